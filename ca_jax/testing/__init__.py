"""What tests of serving code need: models small enough to build in a test.

Shipped with the package, so that code built on ca_jax can be tested against them.

Not here: anything the engine itself uses, and test cases.
"""
