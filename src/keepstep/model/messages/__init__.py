"""What processes of keepstep say to each other: frozen values, one module a conversation.

`KIND` is the name a message has on the wire. `core/wire/codec.py` turns messages into bytes and
back, checked field by field.
"""
