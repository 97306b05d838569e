"""Recovery SLAs: a language for promises about recoveries, and their evaluation on records of runs."""
