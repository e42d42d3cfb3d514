//! What is tried, and how the outcome is judged.

use super::client::{Answer, Client, Error, Held, Setting};
use super::report::{Finding, Measured, Shown, Verdict};

/// The ways to allocate, as the clients name them.
pub const ALLOCATORS: [&str; 11] = [
    "malloc",
    "pitch",
    "managed",
    "async",
    "async-per-thread",
    "pool",
    "managed-pool",
    "vmm",
    "array",
    "array-3d",
    "mipmapped-array",
];

const NOT_FOUND: i32 = 500;
const NOT_SUPPORTED: i32 = 801;

/// Measures with one client.
#[must_use]
pub fn measure(client: &Client, setting: &Setting) -> Measured {
    let mut measured = Measured { client: client.name.clone(), ..Measured::default() };
    match client.run(setting, &steps(["info"])) {
        Ok(answers) => {
            for answer in answers {
                if let Answer::Info { free, total, device } = answer {
                    measured.shown = Some(Shown { free, total, device });
                }
            }
        }
        Err(error) => {
            measured.error = Some(error.to_string());
            return measured;
        }
    }
    // Clients that cannot look say nothing of it.
    for answer in client.run(setting, &steps(["entries"])).unwrap_or_default() {
        if let Answer::Entry { name, file } = answer {
            measured.functions.entry(file).or_default().push(name);
        }
    }
    let alone = ALLOCATORS.map(|allocator| (allocator, alone(client, setting, allocator)));
    let of_malloc = alone.iter().find_map(|(_, found)| found.as_ref().ok()?.mib).unwrap_or_default();
    let is_there = |found: &Result<Finding, Error>| {
        found.as_ref().is_ok_and(|finding| finding.verdict != Verdict::Absent)
    };
    let there: Vec<_> = alone.iter().filter(|(_, found)| is_there(found)).map(|(name, _)| *name).collect();
    let mut findings: Vec<_> = alone.into_iter().map(|(name, found)| (name.to_owned(), found)).collect();
    findings.push(("all of these together".to_owned(), sum(client, setting, &together(setting, &there))));
    // No more than `most_mib` at any time: others may use the rest of the card.
    let half = setting.limit_mib / 2;
    let (some, rest, malloc) = (
        format!("take:malloc:{half}"),
        format!("take:malloc:{}", setting.most_mib() - half),
        format!("take:malloc:{}", setting.most_mib()),
    );
    for (name, by) in [("two processes", "malloc"), ("two processes, async", "async")] {
        let held = client.hold(setting, &[some.replace("malloc", by)]);
        let rest = rest.replace("malloc", by);
        findings.push((name.to_owned(), held.and_then(|held| beside(client, setting, held, &rest))));
    }
    let fork = [format!("fork:malloc:{half}"), rest.clone()];
    findings.push(("a fork".to_owned(), sum(client, setting, &fork)));
    for (name, verb) in
        [("a child's program", "spawn"), ("a child's program without environment", "spawn-clean")]
    {
        let steps = [some.clone(), verb.to_owned(), rest.clone()];
        findings.push((name.to_owned(), sum(client, setting, &steps)));
    }
    let killed = client.hold(setting, std::slice::from_ref(&some)).map(drop);
    let killed = killed.and_then(|()| after(client, setting, std::slice::from_ref(&malloc), of_malloc));
    findings.push(("after a killed process".to_owned(), killed));
    for (name, verb) in [("after exec", "exec"), ("after exec without environment", "exec-clean")] {
        let steps = [some.clone(), verb.to_owned(), malloc.clone()];
        findings.push((name.to_owned(), after(client, setting, &steps, of_malloc)));
    }
    measured.findings = findings
        .into_iter()
        .map(|(probe, found)| match found {
            Ok(found) => Finding { probe, ..found },
            Err(error) => Finding {
                probe,
                verdict: Verdict::Failed,
                note: Some(error.to_string()),
                ..Finding::default()
            },
        })
        .collect();
    measured.doubt(setting);
    measured
}

fn steps<const N: usize>(steps: [&str; N]) -> [String; N] {
    steps.map(str::to_owned)
}

/// What each step took: MiB and the code that ended it.
fn taken(answers: &[Answer]) -> Vec<(u64, i32)> {
    let take = |answer: &Answer| match answer {
        Answer::Take { mib, code, .. } => Some((*mib, *code)),
        _ => None,
    };
    answers.iter().filter_map(take).collect()
}

/// One way to allocate in a process of its own, until it fails; and again, when all has been freed.
fn alone(client: &Client, setting: &Setting, allocator: &str) -> Result<Finding, Error> {
    let take = format!("take:{allocator}:{}", setting.most_mib());
    let answers = client.run(setting, &[take.clone(), "free".to_owned(), take])?;
    let (first, code, second) = match taken(&answers).as_slice() {
        [(first, code), (second, _)] => (*first, *code, *second),
        _ => (0, 0, 0),
    };
    if first == 0 && (code == NOT_FOUND || code == NOT_SUPPORTED) {
        return Ok(Finding { verdict: Verdict::Absent, ..Finding::default() });
    }
    Ok(judge(setting, first.max(second), code, Some((first, second))))
}

/// A part by each way to allocate, one after the other, and all that is tried in all.
fn together(setting: &Setting, allocators: &[&str]) -> Vec<String> {
    // Of no ways there is no part.
    let (step, count) = (setting.step_mib(), allocators.len().max(1) as u64);
    let steps = setting.most_mib().div_ceil(step);
    let part = |(number, by): (u64, &&str)| {
        let more = u64::from(number < steps % count);
        format!("take:{by}:{}", (steps / count + more) * step)
    };
    (0..).zip(allocators).map(part).collect()
}

/// All steps together.
fn sum(client: &Client, setting: &Setting, steps: &[String]) -> Result<Finding, Error> {
    let taken = taken(&client.run(setting, steps)?);
    Ok(judge(setting, taken.iter().map(|(mib, _)| mib).sum(), 0, None))
}

/// What one process has, and another takes beside it.
fn beside(client: &Client, setting: &Setting, held: Held, step: &str) -> Result<Finding, Error> {
    let mut all = taken(&held.answers);
    all.extend(taken(&client.run(setting, &steps([step]))?));
    held.end()?;
    Ok(judge(setting, all.iter().map(|(mib, _)| mib).sum(), 0, None))
}

/// What the last step takes when an earlier user of the memory is gone: as much as a process that came first.
fn after(client: &Client, setting: &Setting, steps: &[String], first: u64) -> Result<Finding, Error> {
    let taken = taken(&client.run(setting, steps)?);
    let (mib, code) = taken.last().copied().unwrap_or_default();
    Ok(judge(setting, mib, code, Some((first, mib))))
}

/// `again`: what was had at first, and what later, when it had been given back.
fn judge(setting: &Setting, mib: u64, code: i32, again: Option<(u64, u64)>) -> Finding {
    let less = again.filter(|(first, second)| second + setting.step_mib() < *first);
    let (verdict, note) = match (mib, less) {
        (mib, _) if mib > setting.limit_mib => (Verdict::Exceeded, None),
        (_, Some((first, second))) => {
            (Verdict::Kept, Some(format!("{first} MiB at first, {second} MiB when they were given back")))
        }
        (0, None) => (Verdict::Refused, Some(format!("the first allocation answered {code}"))),
        _ => (Verdict::Held, None),
    };
    Finding { mib: Some(mib), verdict, note, ..Finding::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_than_the_limit_is_exceeded_and_less_later_is_kept() {
        let setting = Setting { limit_mib: 1024, environment: Vec::new() };
        for (mib, again, expected) in [
            (1024, None, Verdict::Held),
            (1056, None, Verdict::Exceeded),
            (0, None, Verdict::Refused),
            // The context has a part of the limit.
            (608, Some((608, 576)), Verdict::Held),
            (608, Some((608, 544)), Verdict::Kept),
            (1088, Some((1088, 0)), Verdict::Exceeded),
            (0, Some((1024, 0)), Verdict::Kept),
        ] {
            assert_eq!(judge(&setting, mib, 2, again).verdict, expected, "{mib} {again:?}");
        }
    }

    #[test]
    fn all_ways_together_try_no_more_than_one_alone() {
        let setting = Setting { limit_mib: 1024, environment: Vec::new() };
        for count in 1..=ALLOCATORS.len() {
            let steps = together(&setting, &ALLOCATORS[..count]);
            let mib: Vec<u64> =
                steps.iter().filter_map(|step| step.rsplit(':').next()?.parse().ok()).collect();
            assert_eq!((mib.len(), mib.iter().sum::<u64>()), (count, setting.most_mib()), "{steps:?}");
        }
        assert!(together(&setting, &[]).is_empty());
    }
}
