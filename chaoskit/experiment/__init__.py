"""plan -> run -> outcome -> verdict."""
