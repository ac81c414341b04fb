"""Numbers: is a step's number wrong, what is at fault, and what is done about it?"""
