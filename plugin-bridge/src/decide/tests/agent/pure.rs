//! The books alone, with as much around them as the services do.

use std::collections::{BTreeMap, BTreeSet};

use super::{Agent, Trouble, cards_of, fresh, uuid};
use crate::checkpoint::{Checkpoint, DeviationFile};
use crate::decide::tests::world::{Around, CARDS, GPU};
use crate::decide::{Books, GrantId, Millis, PodPhase, Resource, UpstreamDevice};
use crate::outside::WriteStep;

pub(in super::super) struct Pure {
    around: Around,
    broken: bool,
    books: parking_lot::Mutex<Books>,
    now: Millis,
    /// The version of the kubelet's book that it read.
    read: Option<u64>,
    deviations: DeviationFile,
    well: Vec<bool>,
}

struct Answer {
    grant: GrantId,
    cards: BTreeSet<usize>,
    again: bool,
}

impl Pure {
    fn take_book(&mut self) {
        let kubelet = self.around.kubelet.lock();
        let (books, now, version) = (self.books.get_mut(), self.now, Some(kubelet.version()));
        match Checkpoint::parse(kubelet.book()) {
            Ok(_) if kubelet.is_spoilt() => panic!("half a book was read as a whole one"),
            Ok(book) if self.read == version => books.observe_same_book(&book, now),
            Ok(book) => {
                books.observe_book(&book, now);
                self.read = version;
            }
            Err(_) => books.observe_refused_book(now),
        }
    }

    /// Looks for a pod that nobody has told of.
    fn look_for(&mut self, resource: &Resource, size: usize) {
        let Resource::Shared(shared) = *resource else { return };
        let (books, api) = (self.books.get_mut(), self.around.api.lock());
        if books.has_candidate(shared, size) || api.away {
            return;
        }
        for pod in api.pods.values().filter(|pod| pod.phase == PodPhase::Pending) {
            if books.pod(&pod.uid).is_none() {
                books.observe_pod(pod.clone(), self.now);
            }
        }
    }

    fn decide(&mut self, resource: &str, ids: &[String]) -> Option<Answer> {
        let (books, now) = (self.books.get_mut(), self.now);
        match books.resource(resource) {
            Resource::Shared(shared) => {
                let granted = books.allocate_shared(shared, ids, now).ok()?;
                let cards = granted.cards.iter().map(|card| card.position()).collect();
                Some(Answer { grant: granted.grant, cards, again: granted.again })
            }
            Resource::Legacy(_) => {
                let granted = books.allocate_legacy(resource, ids, now).ok()?;
                let cards = cards_of(granted.devices.iter().map(String::as_str))?;
                Some(Answer { grant: granted.grant, cards, again: granted.again })
            }
        }
    }

    fn write(&mut self) {
        self.deviations = self.books.get_mut().deviations();
    }
}

impl Agent for Pure {
    fn start(around: Around, broken: bool) -> Self {
        let well = vec![true; CARDS];
        let books = parking_lot::Mutex::new(fresh(broken, &well));
        let deviations = DeviationFile::default();
        let mut agent = Self { around, broken, books, now: 1, read: None, deviations, well };
        agent.nvidia_returns();
        agent
    }

    fn restart(&mut self) {
        *self.books.get_mut() = fresh(self.broken, &self.well);
        self.read = None;
        self.books.get_mut().remember(self.deviations.data.entries.clone());
        self.tick();
        self.read_book();
        self.nvidia_returns();
    }

    fn now(&self) -> Millis {
        self.now
    }

    fn tick(&mut self) {
        self.now += 1;
    }

    fn pass(&mut self, milliseconds: Millis) {
        self.now += milliseconds;
        self.books.get_mut().reconcile(self.now);
    }

    fn tell<R>(&self, what: impl FnOnce(&mut Books, Millis) -> R) -> R {
        what(&mut self.books.lock(), self.now)
    }

    fn read_book(&mut self) {
        if !self.is_up_to_date() {
            self.take_book();
        }
    }

    fn is_up_to_date(&self) -> bool {
        self.read == Some(self.around.kubelet.lock().version())
    }

    fn notice_kubelet(&mut self, at: Millis) {
        let whole = !self.around.kubelet.lock().is_spoilt();
        self.books.get_mut().observe_kubelet_start(whole, at);
        self.take_book();
    }

    fn ask(&mut self) {
        self.now += 1;
        let (asked, rows) = (self.now, self.around.kubelet.lock().list());
        self.now += 1;
        self.books.get_mut().observe_list(&rows, asked, self.now);
    }

    fn set_well(&mut self, card: usize, well: bool) {
        self.well[card] = well;
    }

    fn nvidia_returns(&mut self) {
        let devices = self.well.iter().enumerate();
        let devices =
            devices.map(|(n, well)| UpstreamDevice { id: uuid(n).into(), healthy: *well, numa: Vec::new() });
        self.books.get_mut().observe_upstream(GPU, Some(devices.collect()));
    }

    fn nvidia_goes(&mut self) {
        self.books.get_mut().upstream_lost(GPU);
    }

    fn list(&mut self, resource: &'static str) -> Option<BTreeMap<String, bool>> {
        let books = self.books.get_mut();
        let listing = books.listing(&books.resource(resource), self.now);
        let mut list = BTreeMap::new();
        books.spell_out(&listing, |device| {
            list.insert(device.id.clone(), device.healthy);
        });
        Some(list)
    }

    fn hang_up(&mut self) {}

    fn prefer(
        &mut self,
        resource: &'static str,
        offered: Vec<String>,
        must: Vec<String>,
        size: usize,
    ) -> Vec<String> {
        self.read_book();
        let kind = self.books.get_mut().resource(resource);
        self.look_for(&kind, size);
        let books = self.books.get_mut();
        match kind {
            Resource::Shared(shared) => books.prefer_shared(shared, &offered, &must, size),
            Resource::Legacy(_) => books.offer_legacy(&offered, &must, size),
        }
    }

    fn allocate(
        &mut self,
        resource: &'static str,
        ids: Vec<String>,
        trouble: Trouble,
    ) -> Option<BTreeSet<usize>> {
        self.read_book();
        let kind = self.books.get_mut().resource(resource);
        self.look_for(&kind, ids.len());
        let answer = self.decide(resource, &ids)?;
        let fails = match trouble {
            Trouble::NvidiaRefuses | Trouble::NvidiaHangs => resource == GPU,
            Trouble::DiskFails(_) => self.deviations != self.books.get_mut().deviations(),
            Trouble::Dies(step) => {
                if step > WriteStep::Rename as u8 {
                    self.write();
                }
                return None;
            }
            Trouble::None => false,
        };
        if fails {
            if !answer.again {
                self.books.get_mut().take_back(answer.grant);
            }
            return None;
        }
        self.write();
        Some(answer.cards)
    }

    fn may_start(&mut self, resource: &'static str, ids: Vec<String>, trouble: Trouble) -> bool {
        let Resource::Shared(shared) = self.books.get_mut().resource(resource) else { return true };
        self.read_book();
        if self.books.get_mut().may_start(shared, &ids).is_err() {
            self.ask();
            if self.books.get_mut().may_start(shared, &ids).is_err() {
                return false;
            }
        }
        let (known, wanted) = (&self.deviations, self.books.get_mut().deviations());
        if *known == wanted {
            return true;
        }
        match trouble {
            Trouble::Dies(step) if step <= WriteStep::Rename as u8 => return false,
            _ => self.write(),
        }
        !matches!(trouble, Trouble::Dies(_))
    }
}
