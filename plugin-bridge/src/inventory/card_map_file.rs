//! The [card map](super::card_map) of this start: reads its file, the kubelet checkpoint and our record, and writes it.

use std::io::ErrorKind;
use std::path::Path;

use gpu_migrate_model::card::Card;
use gpu_migrate_model::names::Dialect;

use super::card_map::{CardMap, Resolved};
use super::evidence;
use crate::node::Paths;
use crate::platform;
use crate::record::RecordRow;
use gpu_migrate_kubelet_api::checkpoint::Checkpoint;

/// Resolves the card map for the cards that were found, and writes it where it changed. Nothing that cannot be read or written keeps the
/// agent from starting: it closes cards instead.
#[must_use]
pub fn resolve(paths: &Paths, dialect: &Dialect, record: &[RecordRow], found: &[Card]) -> Resolved {
    let path = paths.card_map();
    let stored = read(&path);
    let evidence = match std::fs::read(paths.checkpoint()) {
        Ok(text) => match Checkpoint::parse(&text) {
            Ok(checkpoint) => Some(evidence::of_containers(dialect, &checkpoint, record)),
            Err(_) => None,
        },
        // A node on which nothing was allocated yet. Where there was an agent before, the checkpoint was lost.
        Err(error) if error.kind() == ErrorKind::NotFound && !paths.has_state() => Some(Vec::new()),
        Err(_) => None,
    };
    let resolved = CardMap::resolve(stored, evidence.as_deref(), found);
    let text = serde_json::to_vec_pretty(&resolved.map).map_err(std::io::Error::from);
    // By what the file holds: a card has fields that are not written.
    let is_written = text.as_ref().is_ok_and(|text| std::fs::read(&path).is_ok_and(|file| file == *text));
    if resolved.known
        && !is_written
        && let Err(error) = text.and_then(|text| platform::replace(&path, &text, |_| Ok(())))
    {
        tracing::warn!(path = %path.display(), %error, "card map not written; the next start rebuilds it from the kubelet checkpoint");
    }
    for (card, reason) in &resolved.closed {
        let uuid = &resolved.map.ranges[card.position()].card.uuid;
        tracing::warn!(%card, uuid, reason, "card is closed to new containers");
    }
    for card in &resolved.missing {
        let uuid = &resolved.map.ranges[card.position()].card.uuid;
        tracing::warn!(%card, uuid, "card is missing; its device IDs stay reserved");
    }
    resolved
}

fn read(path: &Path) -> Option<CardMap> {
    let text = match std::fs::read(path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return None,
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "card map cannot be read; rebuilding it from the kubelet checkpoint");
            return None;
        }
    };
    match serde_json::from_slice(&text) {
        Ok(map) => Some(map),
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "card map is damaged; rebuilding it from the kubelet checkpoint");
            None
        }
    }
}
