"""What proves a claim: figures of how far outputs differ, detectors of bad replies, the serve harness."""
