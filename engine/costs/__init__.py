"""What a step costs on this machine: measured at start-up, corrected by every step."""
