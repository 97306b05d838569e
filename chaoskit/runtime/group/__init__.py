"""Process groups of one generation: how members meet, how they leave at once, and how they move to the next one."""
