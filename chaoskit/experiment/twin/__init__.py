"""Unbroken runs of the same job or command, with which a broken run is compared."""
