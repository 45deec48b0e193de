"""What the papers ran and claim: one file a paper."""
