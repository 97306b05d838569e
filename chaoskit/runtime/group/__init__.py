"""Process groups of one generation: how members meet, leave at once, and move to the next one."""
