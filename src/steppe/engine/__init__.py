"""What happens inside a step. Private: nothing here is part of the public interface."""
