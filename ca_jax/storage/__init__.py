"""The AttentionStore: KV kept between turns, in blocks of host DRAM and of SSD.

    layout = KVLayout.uniform(num_layers=30, num_kv_heads=3, head_dim=64, dtype="float32", block_tokens=128)
    store = AttentionStore(layout, StoreConfig(dram_gib=2.0))
    save = store.prepare_save("session", 0, token_ids)  # None: no room, and nothing is lost by it
    save.write_all(kv)                                  # [L, 2, T, K, H], from any thread
    store.complete_save(save)
    load = store.prepare_load("session", token_ids)     # None: a miss, recompute
    load.read(0, staging).result()                      # [2, S, K, H], layer by layer
    store.complete_load(load)
    store.discard("session", discarded)                 # bool [T]: forgotten in place, the others stay as they are

Not here: JAX, models, or copies between host and device.
"""
