"""What only a cluster has, and takes away: pods. Every run is judged like those of ``suites.recovery``."""
