"""The parts of ``examples/gpt.py``, a character-level GPT trained with two sets of operators.

``model`` is the network, ``text`` what it reads, ``training`` one run and the comparison of two,
``generation`` the writing, ``checkpoint`` the file of weights, ``report`` what the reader sees.
"""
