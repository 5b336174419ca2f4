"""Every use of Ray's private interfaces."""
