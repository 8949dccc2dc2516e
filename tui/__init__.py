"""The what-if explorer: a terminal application that makes a person understand a plan by changing it.

It holds no formula: every figure on the screen comes from the functions that the command line calls.
"""
