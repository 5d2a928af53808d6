"""What all commands share on a terminal: exit statuses, error output, JSON and a progress line. Torch-free."""
