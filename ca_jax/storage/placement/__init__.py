"""What is kept where: policies, the orders they choose from, and who holds which block."""
