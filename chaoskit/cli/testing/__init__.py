"""Commands that run chaos tests, report on them, keep their records, and compare them."""
