"""Reports on outcomes: terminal, JUnit, JSON and one self-contained HTML page."""
