BEGIN TRANSACTION;
CREATE TABLE deployments (name TEXT PRIMARY KEY, body TEXT NOT NULL);
INSERT INTO "deployments" VALUES('verses','{"uid": "u-verses", "spec": {"name": "verses", "model": "tiny", "source": "a", "privacy": "open", "objective": "auto", "dtype": "bfloat16", "kv_dtype": null, "max_context": 0, "max_new_tokens": 1024, "prompt_tokens": null, "new_tokens": null, "concurrency": 8, "max_time_per_token_s": null, "max_inter_token_latency_s": null, "kv_overcommit": false, "allow_streaming": false, "kv_swap_bytes": 0, "kv_swap_on_disk": false, "prefix_cache": false, "speculation": "auto", "draft": "off", "mode": "no-bubbles", "micro_batches": 0, "exclude": [], "standby": [], "reserve": {}, "quantisation": {}, "head_quantisation": null, "rule": [], "layers": [{"node": "a", "layers": {"first": 0, "end": 4}}, {"node": "b", "layers": {"first": 4, "end": 12}}], "replicas": 1, "replica": 0}, "manifest_digest": "dddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddd", "placement": {"stages": [{"index": 0, "node_id": "id-a", "node_name": "a", "address": "a:7000", "layers": {"first": 0, "end": 4}, "parameter_bytes": 328704, "kv_bytes": 524288, "workspace_bytes": 68026368, "weight_budget_bytes": 0, "streamed_bytes": 0, "disk_read_bytes_per_s": 0.0, "disk_write_bytes_per_s": 0.0}, {"index": 1, "node_id": "id-b", "node_name": "b", "address": "b:7000", "layers": {"first": 4, "end": 12}, "parameter_bytes": 624768, "kv_bytes": 1048576, "workspace_bytes": 68027904, "weight_budget_bytes": 0, "streamed_bytes": 0, "disk_read_bytes_per_s": 0.0, "disk_write_bytes_per_s": 0.0}], "kv_block_tokens": 16, "kv_blocks": 64, "micro_batch": 1, "micro_batches": 2, "predicted": null, "note": "", "costs": [], "sweep": 1, "saved_states": 0, "speculation": "bits", "guesses": null, "draft": null, "guess_slots": 0}, "epoch": 1, "phase": "ready", "ever_ready": true, "failure": null}');
INSERT INTO "deployments" VALUES('tales','{"uid": "u-tales", "spec": {"name": "tales", "model": "tiny", "source": "a", "privacy": "open", "objective": "auto", "dtype": "bfloat16", "kv_dtype": null, "max_context": 0, "max_new_tokens": 1024, "prompt_tokens": null, "new_tokens": null, "concurrency": 8, "max_time_per_token_s": null, "max_inter_token_latency_s": null, "kv_overcommit": false, "allow_streaming": false, "kv_swap_bytes": 0, "kv_swap_on_disk": false, "prefix_cache": false, "speculation": "auto", "draft": "off", "mode": "no-bubbles", "micro_batches": 0, "exclude": [], "standby": [], "reserve": {}, "quantisation": {}, "head_quantisation": null, "rule": [], "layers": [{"node": "a", "layers": {"first": 0, "end": 4}}, {"node": "b", "layers": {"first": 4, "end": 12}}], "replicas": 1, "replica": 0}, "manifest_digest": "dddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddd", "placement": {"stages": [{"index": 0, "node_id": "id-a", "node_name": "a", "address": "a:7000", "layers": {"first": 0, "end": 4}, "parameter_bytes": 328704, "kv_bytes": 524288, "workspace_bytes": 68026368, "weight_budget_bytes": 0, "streamed_bytes": 0, "disk_read_bytes_per_s": 0.0, "disk_write_bytes_per_s": 0.0}, {"index": 1, "node_id": "id-b", "node_name": "b", "address": "b:7000", "layers": {"first": 4, "end": 12}, "parameter_bytes": 624768, "kv_bytes": 1048576, "workspace_bytes": 68027904, "weight_budget_bytes": 0, "streamed_bytes": 0, "disk_read_bytes_per_s": 0.0, "disk_write_bytes_per_s": 0.0}], "kv_block_tokens": 16, "kv_blocks": 64, "micro_batch": 1, "micro_batches": 2, "predicted": null, "note": "", "costs": [], "sweep": 1, "saved_states": 0, "speculation": "bits", "guesses": null, "draft": null, "guess_slots": 0}, "epoch": 18446744073709551616, "phase": "loading", "ever_ready": true, "failure": {"code": 14, "reason": "STAGE_FAILED", "field": "", "message": "stage 1 of tales failed on node b; the node''s log says why"}}');
CREATE TABLE links (
    sender TEXT NOT NULL,
    receiver TEXT NOT NULL,
    reported_at REAL NOT NULL,
    body TEXT NOT NULL,
    PRIMARY KEY (sender, receiver)
);
CREATE TABLE nodes (node_id TEXT PRIMARY KEY, body TEXT NOT NULL);
INSERT INTO "nodes" VALUES('id-a','{"node_id": "id-a", "name": "a", "address": "a:7000", "wire_version": 1, "facts": {"kind": "cpu", "model": "test", "cores": 4, "memory_total_bytes": 8589934592, "memory_budget_bytes": 4294967296, "unified_memory": false, "software": "test", "bits_fingerprint": "", "takes_guesses": false, "keeps_states_of_guesses": false, "kernels": null}, "own_labels": {}, "set_labels": {}}');
INSERT INTO "nodes" VALUES('id-b','{"node_id": "id-b", "name": "b", "address": "b:7000", "wire_version": 1, "facts": {"kind": "cpu", "model": "test", "cores": 4, "memory_total_bytes": 8589934592, "memory_budget_bytes": 4294967296, "unified_memory": false, "software": "test", "bits_fingerprint": "", "takes_guesses": false, "keeps_states_of_guesses": false, "kernels": null}, "own_labels": {}, "set_labels": {}}');
INSERT INTO "nodes" VALUES('id-m','{"node_id": "id-m", "name": "m", "address": "m:7000", "wire_version": 1, "facts": {"kind": "cpu", "model": "test", "cores": 4, "memory_total_bytes": 8589934592, "memory_budget_bytes": 4294967296, "unified_memory": false, "software": "test", "bits_fingerprint": "", "takes_guesses": false, "keeps_states_of_guesses": false, "kernels": null}, "own_labels": {}, "set_labels": {}}');
CREATE TABLE operations (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    operation_id TEXT NOT NULL UNIQUE,
    fingerprint TEXT NOT NULL,
    outcome BLOB NOT NULL
);
INSERT INTO "operations" VALUES(1,'op-tales','p',X'');
INSERT INTO "operations" VALUES(2,'op-verses','p',X'');
CREATE TABLE profiles (
    node_id TEXT NOT NULL,
    reported_at REAL NOT NULL,
    body TEXT NOT NULL
);
CREATE TABLE retired (name TEXT PRIMARY KEY, epoch INTEGER NOT NULL);
CREATE TABLE term (site TEXT NOT NULL, number INTEGER NOT NULL);
INSERT INTO "term" VALUES('ff7cbf29ec744e2bbd30afe4d5f08bf9',1);
CREATE TABLE traffic (
    name TEXT NOT NULL,
    model TEXT NOT NULL,
    body TEXT NOT NULL,
    PRIMARY KEY (name, model)
);
CREATE INDEX profiles_of_node ON profiles (node_id);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('operations',2);
COMMIT;
PRAGMA user_version=4;
