"""What the evidence says: terminal, JUnit, JSON and one self-contained HTML page."""
