"""Commands that test: chaos tests, their reports and records, and comparisons of them."""
