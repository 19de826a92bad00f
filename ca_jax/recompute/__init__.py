"""KV that is computed anew in part: blended chunks, repaired histories."""
