"""The planner against numbers of others: measured steps to which it was fitted, and published rows that it reproduces.

For chapter 15 and the tests. Each experiment reads its own file of book/recorded, and may import the planner, which
imports none of them.
"""
