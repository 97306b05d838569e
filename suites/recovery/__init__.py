"""Every fault at every moment: does the same training come back, and is nobody blamed for being slow?"""
