"""Checks against silent corruption: which rank or batch is responsible for numbers that are wrong or not finite."""
