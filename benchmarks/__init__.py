"""Each operator beside its peers, in one process: ``python -m pkg bench [operator ...]``.

A module of this package is the benchmark of the operator whose name it has: it has a function
``cases(device)`` that yields :class:`harness.Case`. ``harness`` does the rest.
"""
