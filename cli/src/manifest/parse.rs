//! From a text to its documents. YAML or JSON is recognised by the first character, as kubectl does it.

use super::{Document, Origin, Packed, Source, source::Input};
use gpu_migrate_replay::dump::Lean;
use serde::de::DeserializeOwned;
use serde_saphyr::{DuplicateKeyPolicy, MergeKeyPolicy, Options, Spanned};
use thiserror::Error;

/// Deeper than any Kubernetes object; `serde_json` has the same limit.
const MAX_DEPTH: usize = 128;

/// The YAML reader is recursive and takes up to 30 KiB of stack a level in a debug build: more than a thread's
/// usual 2 MiB at the deepest text that is allowed.
const STACK_BYTES: usize = 16 << 20;

/// A text that is neither YAML nor JSON.
#[derive(Debug, Error)]
#[error("{source_name}: document {document} cannot be read: {reason}")]
pub struct ParseError {
    pub source_name: String,
    /// The document that is broken, counted from 1.
    pub document: usize,
    /// The parser's message, with line and column where it knows them.
    pub reason: String,
}

/// Splits a text into its documents; empty ones are skipped.
///
/// What stands before a broken document is still returned; what follows it is too, unless the text cannot be
/// split any further.
#[must_use]
pub fn documents(input: &Input) -> (Vec<Document>, Vec<ParseError>) {
    let (found, errors) = read(input);
    let plain = |Document { origin, value: Lean(value) }: Document<Lean>| Document { origin, value };
    (found.into_iter().map(plain).collect(), errors)
}

/// The same for `plan`: of a dump of a cluster as much as it needs.
#[must_use]
pub fn packed(input: &Input) -> (Vec<Document<Packed>>, Vec<ParseError>) {
    read(input)
}

type Read<V> = (Vec<Document<V>>, Vec<ParseError>);

fn read<V: DeserializeOwned + Send>(input: &Input) -> Read<V> {
    let text = input.text.trim_start_matches('\u{feff}');
    if text.trim_start().starts_with('{') {
        // A YAML flow mapping begins the same way: JSON first, YAML if that fails.
        let (found, errors) = json_documents(&input.source, text);
        if errors.is_empty() || is_json(&input.source) {
            return (found, errors);
        }
    }
    yaml_documents(&input.source, text)
}

fn is_json(source: &Source) -> bool {
    matches!(source, Source::File(path) if path.extension().is_some_and(|e| e == "json"))
}

fn json_documents<V: DeserializeOwned>(source: &Source, text: &str) -> Read<V> {
    let mut found = Vec::new();
    let mut stream = serde_json::Deserializer::from_str(text).into_iter::<V>();
    loop {
        let begin = text.get(stream.byte_offset()..).unwrap_or_default();
        let begin = text.len() - begin.trim_start().len();
        let line = 1 + text.get(..begin).unwrap_or_default().matches('\n').count() as u64;
        let origin = Origin { source: source.clone(), document: found.len() + 1, line, items: Vec::new() };
        match stream.next() {
            None => return (found, Vec::new()),
            Some(Ok(value)) => found.push(Document { origin, value }),
            Some(Err(error)) => {
                let error = ParseError {
                    source_name: source.to_string(),
                    document: origin.document,
                    reason: error.to_string(),
                };
                return (found, vec![error]);
            }
        }
    }
}

fn yaml_documents<V: DeserializeOwned + Send>(source: &Source, text: &str) -> Read<V> {
    let parsed = std::thread::scope(|scope| {
        std::thread::Builder::new()
            .stack_size(STACK_BYTES)
            .spawn_scoped(scope, || yaml_documents_here(source, text))
            .map_err(|error| format!("no thread to read it in: {error}"))?
            .join()
            .map_err(|_| "the YAML reader gave up".to_owned())
    });
    parsed.unwrap_or_else(|reason| {
        (Vec::new(), vec![ParseError { source_name: source.to_string(), document: 1, reason }])
    })
}

fn yaml_documents_here<V: DeserializeOwned>(source: &Source, text: &str) -> Read<V> {
    let (mut found, mut errors) = (Vec::new(), Vec::new());
    let mut bytes = text.as_bytes();
    let stream = serde_saphyr::read_with_options::<_, Spanned<V>>(&mut bytes, yaml_options(text.len()));
    for (index, document) in stream.enumerate() {
        match document {
            Ok(spanned) => {
                let origin = Origin {
                    source: source.clone(),
                    document: index + 1,
                    line: spanned.referenced.line().max(1),
                    items: Vec::new(),
                };
                found.push(Document { origin, value: spanned.value });
            }
            Err(error) => errors.push(ParseError {
                source_name: source.to_string(),
                document: index + 1,
                reason: error.without_snippet().to_string(),
            }),
        }
    }
    (found, errors)
}

/// kubectl's reading of YAML (1.1) where it matters: `mode: 0644` is octal, `yes` is a boolean, merge keys expand.
/// A duplicate key is an error, where kubectl only warns.
///
/// Limits on nodes and events grow with the text: a dump of a cluster is readable, and aliases still cannot multiply it.
fn yaml_options(length: usize) -> Options {
    serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_depth: MAX_DEPTH,
            max_documents: length.max(1024),
            max_nodes: length.max(250_000),
            max_events: length.saturating_mul(2).max(1_000_000),
        },
        duplicate_keys: DuplicateKeyPolicy::Error,
        merge_keys: MergeKeyPolicy::Merge,
        legacy_octal_numbers: true,
        with_snippet: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(name: &str, text: &str) -> (Vec<Document>, Vec<ParseError>) {
        documents(&Input { source: Source::File(name.into()), text: text.to_owned() })
    }

    #[test]
    fn the_dump_of_a_large_cluster_is_readable() {
        let pod = "- {kind: Pod, apiVersion: v1, metadata: {name: p, labels: {a: b, c: d, e: f, g: h}}}\n";
        let text = format!("kind: List\napiVersion: v1\nitems:\n{}", pod.repeat(20_000));
        let (found, errors) = read("dump.yaml", &text);
        assert!(errors.is_empty(), "{errors:?}");
        assert_eq!(found[0].value["items"].as_array().unwrap().len(), 20_000);
    }

    #[test]
    fn a_yaml_stream_keeps_numbers_and_lines() {
        let (found, errors) = read("a.yaml", "# head\nkind: A\n---\n---\nkind: B\n...\n---\n\nkind: C\n");
        assert!(errors.is_empty(), "{errors:?}");
        let seen = found.iter().map(|d| (d.origin.document, d.origin.line)).collect::<Vec<_>>();
        assert_eq!(seen, [(1, 2), (2, 5), (3, 9)]);
        assert_eq!(found[1].value, json!({"kind": "B"}));
    }

    #[test]
    fn a_json_stream_keeps_numbers_and_lines() {
        let (found, errors) = read("a.json", "{\"kind\":\"A\"}\n\n{\n\t\"kind\":\"B\"}\n");
        assert!(errors.is_empty(), "{errors:?}");
        let seen = found.iter().map(|d| (d.origin.document, d.origin.line)).collect::<Vec<_>>();
        assert_eq!(seen, [(1, 1), (2, 3)]);
    }

    #[test]
    fn a_flow_mapping_is_yaml() {
        let (found, errors) = read("a.yaml", "{kind: Pod, spec: {x: 1}}\n");
        assert!(errors.is_empty(), "{errors:?}");
        assert_eq!(found[0].value, json!({"kind": "Pod", "spec": {"x": 1}}));
    }

    #[test]
    fn anchors_and_merge_keys_are_expanded() {
        let (found, errors) = read("a.yaml", "a: &x {n: 1}\nb:\n  <<: *x\n  m: 2\n");
        assert!(errors.is_empty(), "{errors:?}");
        assert_eq!(found[0].value["b"], json!({"n": 1, "m": 2}));
    }

    #[test]
    fn scalars_are_read_as_kubectl_reads_them() {
        let (found, _) =
            read("a.yaml", "mode: 0644\nsize: 1_000\non: yes\nport: \"8080\"\nexp: 1e3\nver: 1.10.0\n");
        assert_eq!(
            found[0].value,
            json!({"mode": 420, "size": 1000, "on": true, "port": "8080", "exp": 1000.0, "ver": "1.10.0"})
        );
    }

    #[test]
    fn a_broken_document_is_named_and_the_rest_is_kept() {
        let (found, errors) = read("a.yaml", "kind: A\n---\nkind: B\nkind: again\n---\nkind: C\n");
        assert_eq!(found.iter().map(|d| d.origin.document).collect::<Vec<_>>(), [1, 3]);
        assert_eq!(errors.len(), 1);
        assert!(errors[0].to_string().starts_with("a.yaml: document 2 cannot be read:"), "{}", errors[0]);

        let (found, errors) = read("a.json", "{\"kind\":\"A\"} {\"kind\":");
        assert_eq!((found.len(), errors.len()), (1, 1));
        assert!(errors[0].to_string().contains("document 2"), "{}", errors[0]);
    }

    #[test]
    fn hostile_texts_end_in_an_error() {
        let deep = "[".repeat(100_000);
        let nested = (0..2_000).map(|i| format!("{}a:\n", " ".repeat(i))).collect::<String>();
        let bomb = "a: &a [x,x,x,x,x,x,x,x,x]\n".to_owned()
            + &('b'..='p')
                .map(|c| {
                    let before = (c as u8 - 1) as char;
                    format!("{c}: &{c} [{}]\n", vec![format!("*{before}"); 9].join(","))
                })
                .collect::<String>();
        let allowed = "[".repeat(MAX_DEPTH - 2) + &"]".repeat(MAX_DEPTH - 2);
        assert!(read("a.yaml", &allowed).1.is_empty());
        for text in
            [deep.as_str(), nested.as_str(), bomb.as_str(), "{\"a\":".repeat(10_000).as_str(), "a: [", "%"]
        {
            let (_, errors) = read("a.yaml", text);
            assert!(!errors.is_empty(), "{}…", text.chars().take(20).collect::<String>());
        }
    }
}
