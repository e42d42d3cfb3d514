//! Events: those of the core group and those of `events.k8s.io` are two views of one store, as in a real API server. Stored is the form
//! of the core group; components write the other, and `kubectl describe` and `kubectl get events` read the core group.

use std::borrow::Cow;

use serde_json::Value;

use super::kinds::Kind;
use super::object::map;

/// The group whose view has to be made.
pub const GROUP: &str = "events.k8s.io";

/// Fields that the two forms name differently: of the core group, of `events.k8s.io`.
const NAMES: &[(&str, &str)] = &[
    ("involvedObject", "regarding"),
    ("message", "note"),
    ("source", "deprecatedSource"),
    ("firstTimestamp", "deprecatedFirstTimestamp"),
    ("lastTimestamp", "deprecatedLastTimestamp"),
    ("count", "deprecatedCount"),
    ("reportingComponent", "reportingController"),
];

/// Whether the objects of a kind are shown in another form than they are stored in.
#[must_use]
pub fn is_view(kind: &Kind) -> bool {
    kind.group == GROUP && kind.plural == "events"
}

/// A stored object as this kind has it.
#[must_use]
pub fn shown<'a>(kind: &Kind, stored: &'a Value) -> Cow<'a, Value> {
    if !is_view(kind) || stored["kind"] != "Event" {
        return Cow::Borrowed(stored);
    }
    Cow::Owned(renamed(stored.clone(), &kind.api_version(), |(core, new)| (core, new)))
}

/// An object of this kind as it is stored.
#[must_use]
pub fn stored(kind: &Kind, shown: Value) -> Value {
    if is_view(kind) { renamed(shown, "v1", |(core, new)| (new, core)) } else { shown }
}

fn renamed(
    mut event: Value,
    api_version: &str,
    direction: impl Fn((&'static str, &'static str)) -> (&'static str, &'static str),
) -> Value {
    let fields = map(&mut event);
    fields.insert("apiVersion".into(), api_version.into());
    for (from, to) in NAMES.iter().copied().map(direction) {
        if let Some(value) = fields.remove(from) {
            fields.insert(to.into(), value);
        }
    }
    event
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::api::kinds::Kinds;
    use serde_json::json;

    #[test]
    fn the_two_forms_are_one_event() {
        let kinds = Kinds::default();
        let of = |group: &str| kinds.find(group, "v1", "events").unwrap();
        let (core, new) = (of(""), of(GROUP));
        assert_eq!(core.id(), new.id());
        let event = json!({
            "apiVersion": "events.k8s.io/v1", "kind": "Event", "metadata": {"name": "e"}, "reason": "Bound",
            "regarding": {"kind": "Pod", "name": "p"}, "note": "to node-a", "reportingController": "extender",
            "series": {"count": 2},
        });
        let kept = stored(&new, event.clone());
        let expected = json!({
            "apiVersion": "v1", "kind": "Event", "metadata": {"name": "e"}, "reason": "Bound",
            "involvedObject": {"kind": "Pod", "name": "p"}, "message": "to node-a", "reportingComponent": "extender",
            "series": {"count": 2},
        });
        assert_eq!(kept, expected);
        assert_eq!(*shown(&core, &kept), kept);
        assert_eq!(*shown(&new, &kept), event);
        assert_eq!(stored(&core, kept.clone()), kept);
    }
}
