"""Exchange over storage that sites already have: a folder, S3, GCS or Azure."""
