//! What a simulated container does: its command is read, not run.
//!
//! `sleep 5` ends well after five seconds; `false` fails at once; `needs-mib 40960` fails if its card memory is limited to less;
//! anything else runs until it is stopped.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::Value;

/// How a container ends by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct End {
    pub after: Duration,
    pub code: i32,
}

/// Annotation of gpu-manager on the plugin's answer: the limit of card memory, in bytes.
const MEMORY_LIMIT: &str = "tencent.com/vcuda-memory";
const AT_ONCE: Duration = Duration::from_millis(150);

/// How the container ends; `None` if it runs until it is stopped. `annotations` are those of the plugins' answers.
#[must_use]
pub fn end(container: &Value, annotations: &BTreeMap<String, String>) -> Option<End> {
    let words = ["command", "args"].into_iter().filter_map(|key| container[key].as_array()).flatten();
    let words: Vec<&str> = words.filter_map(Value::as_str).collect();
    match words.as_slice() {
        ["sleep", seconds] => {
            let seconds: f64 = seconds.parse().ok().filter(|s: &f64| s.is_finite() && *s >= 0.0)?;
            Some(End { after: Duration::from_secs_f64(seconds), code: 0 })
        }
        ["false"] => Some(End { after: AT_ONCE, code: 1 }),
        ["needs-mib", mib] => {
            let limit: u64 = annotations.get(MEMORY_LIMIT)?.parse().ok()?;
            let needed: u64 = mib.parse().ok()?;
            (limit >> 20 < needed).then_some(End { after: AT_ONCE, code: 137 })
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn commands_are_understood() {
        let limit = |mib: u64| BTreeMap::from([(MEMORY_LIMIT.to_owned(), (mib << 20).to_string())]);
        let ends = |command: Value, annotations: &BTreeMap<String, String>| {
            end(&json!({"command": command}), annotations).map(|end| end.code)
        };
        assert_eq!(ends(json!(["sleep", "0.5"]), &limit(0)), Some(0));
        assert_eq!(ends(json!(["false"]), &limit(0)), Some(1));
        assert_eq!(ends(json!(["needs-mib", "1024"]), &limit(512)), Some(137));
        assert_eq!(ends(json!(["needs-mib", "1024"]), &limit(2048)), None);
        assert_eq!(ends(json!(["needs-mib", "1024"]), &BTreeMap::new()), None, "a whole card has no limit");
        assert_eq!(ends(json!(["serve"]), &limit(0)), None);
    }
}
