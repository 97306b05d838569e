"""Unbroken runs of the same job or command, with which a broken one is compared."""
