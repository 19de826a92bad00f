"""What tests of code built on ca_jax need: models small enough to build in a test.

Not here: anything the engine itself uses, stores of a set pace (`benchmarks.paced`), and test cases.
"""
