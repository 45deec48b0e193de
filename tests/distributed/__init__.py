"""Two processes must do what one does. How these tests run is said in conftest.py."""
