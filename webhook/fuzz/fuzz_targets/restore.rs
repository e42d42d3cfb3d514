//! Any text as the record of a rewritten pod: never a panic, and a record that does not parse changes nothing.
#![no_main]

use gpu_migrate_webhook::restore::restore;
use libfuzzer_sys::fuzz_target;
use serde_json::json;

fuzz_target!(|record: &str| {
    let mut pod = json!({
        "metadata": {"name": "p", "annotations": {"gpu-migrate.io/original": record, "own": "x"}},
        "spec": {"nodeSelector": {"a": "b"}, "tolerations": [{"key": "k"}], "containers": [
            {"name": "main", "env": [{"name": "A", "value": "1"}],
             "resources": {"limits": {"tencent.com/vcuda-core": "100"}, "requests": {"tencent.com/vcuda-core": "100"}}}]},
    });
    let before = pod.clone();
    if restore(&mut pod).is_err() {
        assert_eq!(pod, before);
    }
});
