// Browsers start no Worker on a page that is opened from a folder. There, this class takes its place: it runs the
// worker's script in a hidden frame of the page.
;(() => {
  if (location.protocol !== "file:") return
  window.Worker = class extends EventTarget {
    constructor(address) {
      super()
      this.early = [] // messages that came before the script had been loaded
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.documentElement.append(this.frame)
      const inner = this.frame.contentWindow
      const load = (source) =>
        new Promise((done) => {
          const script = inner.document.createElement("script")
          script.src = source
          script.onload = done
          inner.document.body.append(script)
        })
      inner.postMessage = (data) => {
        const event = new MessageEvent("message", { data })
        this.dispatchEvent(event)
        if (this.onmessage) this.onmessage(event)
      }
      inner.importScripts = (...sources) =>
        sources.reduce((before, source) => before.then(() => load(source)), Promise.resolve())
      load(new URL(address, location.href).href).then(() => {
        const early = this.early
        this.early = null
        early.forEach((data) => this.postMessage(data))
      })
    }
    postMessage(data) {
      if (this.early) this.early.push(data)
      else this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }))
    }
    terminate() {
      this.frame.remove()
    }
  }
})()
