"""Pickles: reading what was pickled without running what it says.

A state holds what a program wants it to hold, so it stays a pickle, which can hold anything and is
written by C code on the trainer's thread. It is the reading that decides what runs. `checked.py` is
a machine for pickles that acts on nothing by itself: whatever is named, called, made or filled goes
to a vocabulary. `known.py` is the vocabulary of plain types, each with a check of its own; `own.py`
adds what the live program's state itself is made of; `inert.py` makes nothing of the others and
keeps them as they are written, for a process that only passes them on.

A format of our own, such as msgpack with a table, would need the same two lists to restore objects
of a program's own classes, and would cost the trainer's thread a walk in Python at each step.
"""
