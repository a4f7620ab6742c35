"""The endpoints: one file per endpoint or family of endpoints."""
