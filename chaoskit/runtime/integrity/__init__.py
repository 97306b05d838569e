"""Checks against silent corruption: the rank or batch that causes wrong or non-finite numbers."""
