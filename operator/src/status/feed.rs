//! What the page shows, with a version for each change: a viewer gets what is newer than what it has.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures::{Stream, StreamExt as _};
use gpu_migrate_runtime::watch::{Object, Update};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt as _;
use kube::core::DeserializeGuard;
use kube::runtime::watcher::Event as WatchEvent;
use serde::Serialize;
use serde_json::value::RawValue;
use tokio::sync::watch;

use super::access::Sight;
use super::view::{self, EventRow};

/// So many Events are kept, the newest.
const EVENTS: usize = 100;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Kind {
    Node,
    Project,
}

/// The rows of all objects.
#[derive(Debug)]
pub struct Feed {
    /// Of this process.
    epoch: u64,
    state: Mutex<Rows>,
    version: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Rows {
    version: u64,
    rows: BTreeMap<(Kind, String), Row>,
    listed: BTreeSet<Kind>,
    /// By their names, with their times.
    events: BTreeMap<String, (Timestamp, Row)>,
}

/// One object; without a text it is gone.
#[derive(Debug)]
struct Row {
    version: u64,
    text: Option<Box<RawValue>>,
}

/// What a viewer lacks.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Batch {
    /// Of the state that the viewer has with it.
    #[serde(skip)]
    pub id: String,
    /// It is all there is: what the viewer has is of another process, or nothing.
    all: bool,
    /// The cluster has been read once.
    complete: bool,
    nodes: Vec<Box<RawValue>>,
    projects: Vec<Box<RawValue>>,
    gone: Vec<Gone>,
    /// Absent for a viewer who may not list Events.
    #[serde(skip_serializing_if = "Option::is_none")]
    events: Option<Vec<Box<RawValue>>>,
}

#[derive(Debug, Serialize)]
struct Gone {
    kind: Kind,
    name: String,
}

impl Batch {
    /// As the data of an event.
    #[must_use]
    pub fn json(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }
}

impl Feed {
    /// Nothing is known yet.
    #[must_use]
    pub fn new(epoch: u64) -> Self {
        Self { epoch, state: Mutex::default(), version: watch::Sender::new(0) }
    }

    /// Notifies of changes.
    #[must_use]
    pub fn changed(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }

    fn rows(&self) -> MutexGuard<'_, Rows> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut Rows)) {
        let mut rows = self.rows();
        let before = rows.version;
        change(&mut rows);
        let after = rows.version;
        drop(rows);
        if after != before {
            self.version.send_replace(after);
        }
    }

    fn set(&self, kind: Kind, name: &str, row: Option<&impl Serialize>) {
        let text = row.and_then(|row| serde_json::value::to_raw_value(row).ok());
        self.change(|rows| rows.set(kind, name, text));
    }

    /// An Event is there. It stays until enough newer ones are, also when the API server has forgotten it.
    fn set_event(&self, event: &EventRow) {
        let Ok(text) = serde_json::value::to_raw_value(event) else { return };
        self.change(|rows| rows.set_event(&event.name, event.time, text));
    }

    /// These are all of the kind.
    fn keep(&self, kind: Kind, names: &BTreeSet<String>) {
        self.change(|rows| {
            let known = rows.rows.keys().filter(|(of, name)| *of == kind && !names.contains(name));
            for (_, name) in known.cloned().collect::<Vec<_>>() {
                rows.set(kind, &name, None);
            }
            if rows.listed.insert(kind) {
                rows.version += 1;
            }
        });
    }

    /// What is newer than the batch with this ID, for a viewer who may see that.
    #[must_use]
    pub fn since(&self, id: &str, sight: Sight) -> Batch {
        let known = id.split_once('-').filter(|(epoch, _)| *epoch == self.epoch.to_string());
        let after = known.and_then(|(_, version)| version.parse::<u64>().ok());
        let rows = self.rows();
        let mut batch = Batch {
            id: format!("{}-{}", self.epoch, rows.version),
            all: after.is_none(),
            complete: rows.listed.len() == 2,
            nodes: Vec::new(),
            projects: Vec::new(),
            gone: Vec::new(),
            events: sight.events.then(|| rows.events_after(after.unwrap_or(0))),
        };
        for ((kind, name), row) in &rows.rows {
            if after.is_some_and(|after| row.version <= after) {
                continue;
            }
            match (&row.text, kind) {
                (Some(text), Kind::Node) => batch.nodes.push(text.clone()),
                (Some(text), Kind::Project) => batch.projects.push(text.clone()),
                (None, _) if after.is_some() => batch.gone.push(Gone { kind: *kind, name: name.clone() }),
                (None, _) => {}
            }
        }
        batch
    }
}

impl Rows {
    fn set(&mut self, kind: Kind, name: &str, text: Option<Box<RawValue>>) {
        let key = (kind, name.to_owned());
        let before = self.rows.get(&key).and_then(|row| row.text.as_ref());
        if before.map(|text| text.get()) == text.as_ref().map(|text| text.get()) {
            return;
        }
        self.version += 1;
        self.rows.insert(key, Row { version: self.version, text });
    }

    fn set_event(&mut self, name: &str, time: Timestamp, text: Box<RawValue>) {
        let before = self.events.get(name).and_then(|(_, row)| row.text.as_ref());
        if before.is_some_and(|before| before.get() == text.get()) {
            return;
        }
        let oldest = self
            .events
            .iter()
            .min_by_key(|(_, (time, _))| *time)
            .map(|(name, (time, _))| (name.clone(), *time));
        match oldest {
            Some((_, oldest)) if self.events.len() >= EVENTS && time < oldest => return,
            Some((oldest, _)) if self.events.len() >= EVENTS && !self.events.contains_key(name) => {
                self.events.remove(&oldest);
            }
            _ => {}
        }
        self.version += 1;
        self.events.insert(name.to_owned(), (time, Row { version: self.version, text: Some(text) }));
    }

    fn events_after(&self, version: u64) -> Vec<Box<RawValue>> {
        let newer = self.events.values().filter(|(_, row)| row.version > version);
        newer.filter_map(|(_, row)| row.text.clone()).collect()
    }
}

/// Keeps the rows of a kind as the watch says. An object that cannot be read keeps the row that it had.
pub async fn follow<K: Object, R: Serialize>(
    mut updates: impl Stream<Item = Update<DeserializeGuard<K>>> + Unpin,
    feed: Arc<Feed>,
    kind: Kind,
    row: impl Fn(&K) -> R,
) {
    let mut listed = BTreeSet::new();
    let set = |object: DeserializeGuard<K>| {
        let name = object.name_any();
        if let Ok(object) = &object.0 {
            feed.set(kind, &name, Some(&row(object)));
        }
        name
    };
    while let Some(update) = updates.next().await {
        match update {
            Update::Event(WatchEvent::Init) => listed.clear(),
            Update::Event(WatchEvent::InitApply(object)) => _ = listed.insert(set(object)),
            Update::Event(WatchEvent::InitDone) => feed.keep(kind, &listed),
            Update::Event(WatchEvent::Apply(object)) => _ = set(object),
            Update::Event(WatchEvent::Delete(object)) => feed.set(kind, &object.name_any(), None::<&R>),
            Update::Undefined => feed.keep(kind, &BTreeSet::new()),
            Update::Interrupted => {}
        }
    }
}

/// Keeps the Events of a watch.
pub async fn follow_events(mut updates: impl Stream<Item = Update<Event>> + Unpin, feed: Arc<Feed>) {
    while let Some(update) = updates.next().await {
        if let Update::Event(WatchEvent::InitApply(event) | WatchEvent::Apply(event)) = update {
            feed.set_event(&view::event(&event));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn since(feed: &Feed, id: &str) -> (String, Value) {
        let batch = feed.since(id, Sight { events: true });
        (batch.id.clone(), serde_json::from_str(&batch.json()).unwrap())
    }

    #[test]
    fn a_viewer_gets_what_it_lacks_and_no_more() {
        let feed = Feed::new(7);
        feed.set(Kind::Node, "a", Some(&json!({"name": "a"})));
        feed.set(Kind::Node, "b", Some(&json!({"name": "b"})));
        let (first, all) = since(&feed, "");
        assert_eq!((&all["all"], all["nodes"].as_array().unwrap().len()), (&json!(true), 2));
        assert_eq!(all["complete"], false, "it is not listed yet");
        feed.keep(Kind::Node, &["a".to_owned(), "b".to_owned()].into());
        feed.keep(Kind::Project, &BTreeSet::new());
        let (second, change) = since(&feed, &first);
        assert_eq!(
            (&change["all"], &change["complete"], &change["nodes"]),
            (&json!(false), &json!(true), &json!([]))
        );

        let mut changed = feed.changed();
        changed.borrow_and_update();
        feed.set(Kind::Node, "a", Some(&json!({"name": "a"})));
        assert!(!changed.has_changed().unwrap(), "it is as it was");
        feed.set(Kind::Node, "a", Some(&json!({"name": "a", "cards": []})));
        feed.keep(Kind::Node, &["a".to_owned()].into());
        assert!(changed.has_changed().unwrap());
        let (_, change) = since(&feed, &second);
        assert_eq!(change["nodes"], json!([{"name": "a", "cards": []}]));
        assert_eq!(change["gone"], json!([{"kind": "node", "name": "b"}]));
    }

    #[test]
    fn a_viewer_of_another_process_gets_everything() {
        let feed = Feed::new(7);
        feed.set(Kind::Node, "a", Some(&json!({"name": "a"})));
        feed.set(Kind::Node, "b", None::<&Value>);
        for id in ["", "8-9", "7-x", "7"] {
            let (_, all) = since(&feed, id);
            assert_eq!(
                (&all["all"], &all["nodes"], &all["gone"]),
                (&json!(true), &json!([{"name": "a"}]), &json!([])),
                "{id}"
            );
        }
    }
    #[test]
    fn the_newest_events_are_kept_and_shown_to_who_may_list_them() {
        let feed = Feed::new(7);
        let event = |second: i64, name: &str, note: &str| EventRow {
            name: name.to_owned(),
            time: Timestamp::from_second(second).unwrap(),
            warning: false,
            reason: "R".to_owned(),
            about: "Node n".to_owned(),
            note: note.to_owned(),
            by: "c".to_owned(),
        };
        for second in 1..=150 {
            feed.set_event(&event(second, &second.to_string(), "first"));
        }
        let (id, all) = since(&feed, "");
        assert_eq!(all["events"].as_array().unwrap().len(), EVENTS);
        assert!(!all.to_string().contains("1970-01-01T00:00:50"), "the oldest go");
        // A list after the watch was lost brings the old ones again.
        feed.set_event(&event(3, "3", "first"));
        assert_eq!(since(&feed, &id).1["events"], json!([]));
        feed.set_event(&event(151, "150", "again"));
        let (_, change) = since(&feed, &id);
        assert_eq!(change["events"].as_array().unwrap().len(), 1);
        assert_eq!(change["events"][0]["note"], "again");
        let without: Value = serde_json::from_str(&feed.since("", Sight { events: false }).json()).unwrap();
        assert_eq!(without.get("events"), None);
    }
}
