"""Membership of a federation: identities, invites, signed member records and the members file."""
