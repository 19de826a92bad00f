"""What the package uses of its dependencies without their promise: names that are not public, one module for each.

Every such name is here, behind one of ours. Each module says which versions have the name and what is lost without it;
`tests/test_private.py` fails where a dependency has dropped it or changed what it does. What tests alone use is in
`tests/private_kit.py`.
"""
