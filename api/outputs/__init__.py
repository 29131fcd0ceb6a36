"""What a model's text says: an answer, its reasoning, and the calls of tools it contains.

`deltas` are the words of the other modules, `source` the text as it grows, `reading` chooses what a
model's text is read as, and there is one module for each way in which models write a call.
"""
