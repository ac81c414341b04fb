"""Preflight: is this fleet fit for a training, and if not, which node, which part?"""
