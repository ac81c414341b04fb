"""Preflight: a command that tests machines before a job; no part of one."""
