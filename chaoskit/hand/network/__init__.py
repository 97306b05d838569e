"""The role on the network: rules for packets, resets of connections, and limits of bandwidth.

-> ``hand/network/operations.py`` has the operations.
"""
