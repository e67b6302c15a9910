"""The processes of one training job."""
