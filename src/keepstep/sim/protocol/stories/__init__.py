"""Stories: runs that are told in text: a plan, what goes wrong, and what is expected of it.

`reader.py` says what a story may say; `tests/sim/protocol/stories/` holds them.
"""
