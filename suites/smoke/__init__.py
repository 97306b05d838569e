"""The quickest suite: does this installation break and judge anything at all?"""
