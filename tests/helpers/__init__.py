"""What several test modules share; found because pytest puts the folder of `conftest.py` on the path."""
