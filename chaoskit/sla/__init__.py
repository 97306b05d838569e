"""Recovery SLAs: what is promised of recoveries, in a language of its own, and whether records of runs show it."""
