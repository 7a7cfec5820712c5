//! Which client is served next: users take turns, whatever the number of their requests.

use std::collections::{HashMap, VecDeque};

/// Requests that wait to be served.
#[derive(Debug)]
pub(crate) struct Turns<T> {
    /// Never an empty queue.
    requests: HashMap<u32, VecDeque<T>>,
    /// Each user with requests, once.
    users: VecDeque<u32>,
}

impl<T: PartialEq> Turns<T> {
    pub(crate) fn new() -> Self {
        Self { requests: HashMap::new(), users: VecDeque::new() }
    }

    pub(crate) fn push(&mut self, user: u32, request: T) {
        let queue = self.requests.entry(user).or_default();
        if queue.is_empty() {
            self.users.push_back(user);
        }
        queue.push_back(request);
    }

    /// The next request; its user goes to the end of the line.
    pub(crate) fn pop(&mut self) -> Option<T> {
        let user = self.users.pop_front()?;
        let queue = self.requests.get_mut(&user)?;
        let request = queue.pop_front();
        if queue.is_empty() {
            self.requests.remove(&user);
        } else {
            self.users.push_back(user);
        }
        request
    }

    /// Takes a request out of the line.
    pub(crate) fn remove(&mut self, user: u32, request: &T) {
        let Some(queue) = self.requests.get_mut(&user) else { return };
        queue.retain(|other| other != request);
        if queue.is_empty() {
            self.requests.remove(&user);
            self.users.retain(|other| *other != user);
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.users.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_of_one_user_delays_another_by_one() {
        let mut turns = Turns::new();
        for request in 0..100 {
            turns.push(1, request);
        }
        turns.push(2, 1000);
        turns.push(3, 2000);
        let served: Vec<_> = std::iter::from_fn(|| turns.pop()).collect();
        assert_eq!(served[..4], [0, 1000, 2000, 1]);
        assert_eq!(served.len(), 102);
        assert!(turns.is_empty() && turns.requests.is_empty());
    }

    #[test]
    fn a_client_that_leaves_the_line_is_not_served() {
        let mut turns = Turns::new();
        for (user, request) in [(1, 'a'), (1, 'b'), (2, 'c')] {
            turns.push(user, request);
        }
        turns.remove(1, &'a');
        turns.remove(2, &'c');
        turns.remove(3, &'d');
        assert_eq!((turns.pop(), turns.pop()), (Some('b'), None));
    }
}
